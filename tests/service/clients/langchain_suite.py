# pyright: reportMissingImports=false
"""LangChain's own suite for embeddings (`langchain-tests`, MIT), for the service at SURGE_URL."""

import os
from typing import Any

from langchain_openai import OpenAIEmbeddings
from langchain_tests.integration_tests import EmbeddingsIntegrationTests


class TestService(EmbeddingsIntegrationTests):
    @property
    def embeddings_class(self) -> type[OpenAIEmbeddings]:
        return OpenAIEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        return {
            "model": "current",
            "base_url": os.environ["SURGE_URL"],
            "api_key": "none",
            "check_embedding_ctx_length": False,
        }
