"""Wing: other people's models. GGUF files, Hugging Face folders, llama2.c files, safetensors.

    load.py                                  a path becomes a model and a tokenizer; start here
    gguf.py, gguf_blocks.py, gguf_model.py   one GGUF file, its blocks, and the model in it
    hf_model.py, hf_tokenizer.py             a folder from Hugging Face; byte-level BPE
    llama2c.py, llama2c_tokenizer.py         Karpathy's llama2.c
    safetensors.py, quantized_file.py        tensors on disk, plain and quantized
    chat.py                                  one turn of a chat as a prompt
    checkpoint.py, files.py                  what they share

Without this package only seeded weights can be loaded.
"""
