# pyright: reportMissingImports=false
"""Vectors by a client of OpenAI's API: the words are its name and the base URL; texts and vectors
are JSON."""

import json
import os
import sys

TEXTS = json.load(sys.stdin)
NAME, URL = sys.argv[1:]
os.environ.update(
    OPENAI_API_KEY="none",
    OPENAI_BASE_URL=URL,
    OPENAI_API_BASE=URL,
    LITELLM_LOCAL_MODEL_COST_MAP="True",
)


def litellm() -> list[list[float]]:
    import litellm

    answer = litellm.embedding(
        "openai/current", TEXTS, api_base=URL, api_key="none", encoding_format=None
    )
    return [each["embedding"] for each in answer.data]


def langchain() -> list[list[float]]:
    from langchain_openai import OpenAIEmbeddings

    embeddings = OpenAIEmbeddings(model="current", base_url=URL, check_embedding_ctx_length=False)
    return [*embeddings.embed_documents(TEXTS[:-1]), embeddings.embed_query(TEXTS[-1])]


def llama_index() -> list[list[float]]:
    from llama_index.embeddings.openai import OpenAIEmbedding

    embedding = OpenAIEmbedding(model_name="current", api_base=URL)
    return [
        *embedding.get_text_embedding_batch(TEXTS[:-1]),
        embedding.get_query_embedding(TEXTS[-1]),
    ]


def haystack() -> list[list[float]]:
    from haystack import Document
    from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder

    documents = [Document(content=text) for text in TEXTS[:-1]]
    embedded = OpenAIDocumentEmbedder(model="current", api_base_url=URL, progress_bar=False).run(
        documents
    )
    last = OpenAITextEmbedder(model="current", api_base_url=URL).run(TEXTS[-1])
    return [*(each.embedding for each in embedded["documents"]), last["embedding"]]


if __name__ == "__main__":
    print(json.dumps(globals()[NAME]()))
