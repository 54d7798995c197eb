"""What the bytes of a store mean: pure encoding and decoding, no storage, no clock.

`envelope` wraps every record with a hash; `records` are the small ones; `manifest` holds a state's tensors and
chunks; `pack` is the layout of a pack. Everything decoded here is hostile until it has been checked here.
"""
