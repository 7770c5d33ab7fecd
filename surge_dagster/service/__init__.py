"""The encoder service: answers queries over HTTP, in the vector spaces of an output, within a
promised time.

A query passes, in this order:

    server.py       uvicorn, and when the request arrived
    gate.py         API key or local host, requests that are late already, metrics
    embeddings.py   body and answer (errors.py, if it is refused)
    spaces.py       the served spaces and their models
    lane.py         token ids, by `worker/tokenization.py` in this process; admission by the
                    promise, queue, passes through the model

and below it, in `engine/encoder`, what the texts of a run pass too: arena, pool, schedule,
quarantine, dispatcher, worker_process, protocol, and in the worker main and a backend.
`server.py` composes the service, too. Files and batches are `batches`, `records` and `batch_run`.
"""
