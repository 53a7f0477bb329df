"""python -m lightning_dilated: the same as the console script."""

from lightning_dilated.cli import main

if __name__ == "__main__":
    main()
