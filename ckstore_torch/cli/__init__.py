"""Commands that `ckstore` has where this package is installed: `import` and `export`.

They are found through the entry points `ckstore.commands` and loaded when they are asked for; torch when they run.
"""
