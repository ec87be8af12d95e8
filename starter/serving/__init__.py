"""Wing: an OpenAI-compatible server, on the standard library.

    python3 -m starter serve --fixture fixtures/quatrains.json

What a request is, and what is answered, without a socket:

    problems.py       an error in OpenAI's shape, and which of the engine's errors become which status
    fields.py         the fields of each body, declared once; which are ignored, and which refused by name
    completions.py    token events -> a completion object, or the chunks of a stream
    chat.py           the same for a conversation
    responses.py      the same in the form of OpenAI's newer API
    generation.py     the engine's requests for one body: submitted together, read together, cancelled together
    answers.py        what is asked and answered: complete, or growing
    live.py           what the engine does, as it happens, for the page live.html
    api.py            method, path and body -> an answer
    openapi.py        the same declarations as an OpenAPI document

How it travels:

    wire.py           HTTP/1.1 as bytes: strict heads, bodies by length or in chunks
    watch.py          notices clients that go away while their request runs
    connection.py     one client: request after request, within limits of size and time
    server.py         all clients: accept, refuse, drain
    asgi.py           the same API for uvicorn and other ASGI servers
    command.py        ``python3 -m starter serve``
    bench.py          ``python3 -m starter bench``: a scenario against any such server
    batch.py          ``python3 -m starter batch``: the same answers to a file of requests

Read ``api.py`` first. The engine does not know this package.
"""
