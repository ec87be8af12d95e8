"""Wing: models from files. Without this package only seeded weights can be loaded.

A path becomes a model and its tokenizer in ``load.py``; begin there. It finds out which of three forms the path has:

    GGUF, one file (llama.cpp)         gguf_model.py     names and sizes in it -> those of our decoder
                                       gguf.py           the container: metadata and tensors
                                       gguf_blocks.py    number formats Q8_0, Q4_0, Q4_1, F16, BF16
                                       gguf_blocks_numpy.py   the same, faster, if NumPy is installed
    a folder from Hugging Face         hf_model.py       config.json and the tensors -> our decoder
                                       safetensors.py    the container
    llama2.c, two files (Karpathy)     llama2c.py        the weights
                                       llama2c_tokenizer.py   the vocabulary, and byte-pair encoding written out

Shared by them:

    hf_tokenizer.py      byte-pair tokenizers of GGUF files and folders, by the package ``tokenizers``
    checkpoint.py        what all readers return, and the order of rotary pairs
    files.py             opening, reading and replacing files

For other uses:

    chat.py              a conversation as a prompt, by the chat template
    quantized_file.py    quantized matrices in a safetensors file, written and read
"""
