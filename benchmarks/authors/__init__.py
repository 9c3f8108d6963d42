"""The comparisons with the code of the methods' authors, one file for each family. `official.py` carries them out."""
