"""Wing: better grids for int8 and int4 than from each group's smallest number to its largest.

    grid_search.py   for each group the grid of least squared error (quantization method "search")
    importance.py    which columns of a matrix matter most, measured on texts

Without this package only quantization method "nearest" works.
"""
