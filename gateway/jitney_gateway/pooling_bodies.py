"""What clients send to embed, classify and rank texts, as records."""

from typing import Annotated, Literal

from msgspec import Meta

from jitney_gateway.wire import Ids, TokenId, WireRecord

MAX_TEXTS = 2048
"""Most texts in one request."""
Texts = Annotated[list[str], Meta(min_length=1, max_length=MAX_TEXTS)]


class EmbeddingRequest(WireRecord):
    """The body of ``/v1/embeddings``: texts, or token ids of the model's own tokenizer."""

    model: str
    input: str | Annotated[list[str | TokenId | Ids], Meta(min_length=1)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None


class ClassifyRequest(WireRecord):
    """The body of ``/v1/classify``, in vLLM's form."""

    model: str
    input: str | Texts


class Document(WireRecord):
    """A text to rank."""

    text: str


class RerankRequest(WireRecord):
    """The body of ``/v1/rerank``, in Jina's form, and of ``/v2/rerank``, in Cohere's."""

    model: str
    query: str
    documents: Annotated[list[str | Document], Meta(min_length=1, max_length=MAX_TEXTS)]
    top_n: Annotated[int, Meta(ge=1)] | None = None
    return_documents: bool | None = None

    def texts(self) -> list[str]:
        """The texts of the documents."""
        return [each if isinstance(each, str) else each.text for each in self.documents]


class ScoreRequest(WireRecord):
    """The body of ``/score``, in vLLM's form. One ``text_1`` is scored with each ``text_2``. Two
    lists of the same length are scored in pairs."""

    model: str
    text_1: str | Texts
    text_2: str | Texts
