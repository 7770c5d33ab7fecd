"""A plain server around sentence-transformers, a thread per request: `python -m
benchmarks.serve_peer MODEL PORT`."""

from __future__ import annotations

import base64
import sys

import uvicorn
from sentence_transformers import SentenceTransformer
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from surge_dagster.engine.model.spec import EncodingSpec


def main() -> None:
    model = SentenceTransformer(
        EncodingSpec(sys.argv[1]).resolve().model_path, device="cpu", local_files_only=True
    )

    async def embeddings(request: Request) -> JSONResponse:
        texts = (await request.json())["input"]
        texts = [texts] if isinstance(texts, str) else texts
        vectors = await run_in_threadpool(model.encode, texts, show_progress_bar=False)
        data = [
            {"index": index, "embedding": base64.b64encode(vector.tobytes()).decode()}
            for index, vector in enumerate(vectors)
        ]
        return JSONResponse({"object": "list", "data": data})

    async def ready(_: Request) -> JSONResponse:
        return JSONResponse({})

    routes = [
        *(
            Route(path, embeddings, methods=["POST"])
            for path in ("/v1/embeddings", "/documents/v1/embeddings")
        ),
        Route("/readyz", ready),
    ]
    uvicorn.run(
        Starlette(routes=routes), host="127.0.0.1", port=int(sys.argv[2]), log_level="warning"
    )


if __name__ == "__main__":
    main()
