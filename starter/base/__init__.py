"""What the spine is built on: strict JSON, a model's sizes and weights, tokenizers, the terminal.

Nothing here knows of pages, batches or steps, so you can read the spine without it.

    strict_json.py    one declaration that parses JSON strictly, writes it back, and prints its JSON Schema
    model_config.py   the sizes of a decoder; how its weights are quantized
    rope.py           how fast the rotary embedding turns
    weights.py        the tensors of a model: names, shapes, drawn from a seed, fingerprints
    tokenizer.py      text to tokens and back, token by token as well; stop strings
    statistics.py     summaries and histograms of durations
    vectors.py        vectors and matrices that callers pass as sequences of numbers
    tensor_json.py    a quantized tensor as JSON
    fault_kinds.py    what can be made to go wrong on purpose
    console.py        lines, tables and progress on a terminal; exit codes
    wings.py          how the spine reaches a wing by name
    bundled.py        the scenarios that come with the project
    kv_bounds.py      how large keys and values can become
    version.py        the version
"""
