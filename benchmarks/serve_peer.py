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

from surge_dagster import EncodingSpec


def main() -> None:
    folder = EncodingSpec(sys.argv[1]).resolve().model_path
    model = SentenceTransformer(folder, device="cpu", local_files_only=True)

    async def embeddings(request: Request) -> JSONResponse:
        texts = (await request.json())["input"]
        if isinstance(texts, str):
            texts = [texts]
        vectors = await run_in_threadpool(model.encode, texts, show_progress_bar=False)
        data = []
        for index, vector in enumerate(vectors):
            encoded = base64.b64encode(vector.tobytes()).decode()
            data.append({"index": index, "embedding": encoded})
        return JSONResponse({"object": "list", "data": data})

    async def ready(_: Request) -> JSONResponse:
        return JSONResponse({})

    routes = [
        Route("/v1/embeddings", embeddings, methods=["POST"]),
        Route("/readyz", ready),
    ]
    app = Starlette(routes=routes)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")


if __name__ == "__main__":
    main()
