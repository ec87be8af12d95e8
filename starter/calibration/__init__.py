"""Wing: better grids for int8 and int4 than "from the smallest to the largest".

    grid_search.py   the grid of least squared error (quantization method "search")
    importance.py    which columns of a matrix matter, measured on a text
"""
