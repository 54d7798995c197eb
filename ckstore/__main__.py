"""`python -m ckstore`: the same as the command `ckstore`."""

from ckstore.cli.main import main

main()
