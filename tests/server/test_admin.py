"""Calls to a server over HTTP, and what is printed of what they return."""

from pathlib import Path
from typing import cast

import pytest
from jitney_server.admin import Admin, RefusedCallError
from jitney_server.ports import ServerPorts
from jitney_server.server import TritonServer
from jitney_server.welcome import print_welcome
from rich.console import Console

from tests.http_server import Quiet, listening

ODD_NAME = "m\u00fc pipe"
INDEX = f'[{{"name": "{ODD_NAME}", "state": "READY"}}, {{"name": "speaks", "state": "READY"}}]'
ANSWERS = {
    "/v2/repository/index": INDEX,
    "/v2/models/a+b,c:d@e%f=g": '{"inputs": []}',
    "/v2/models/speaks": '{"inputs": [{"name": "text_input"}]}',
}


class Handler(Quiet):
    """As the server (2.51), it does not decode the names of models."""

    def answer(self) -> None:
        text = ANSWERS.get(self.path, f"unknown: {self.path}")
        self.send_response(200 if self.path in ANSWERS else 404)
        self.end_headers()
        self.wfile.write(text.encode())

    do_GET = answer
    do_POST = answer


def admin_of(address: str) -> Admin:
    host, port = address.split(":")
    return Admin(host, ServerPorts(int(port), 0, 0), {})


def test_a_call_for_a_name_with_odd_letters_is_refused_by_the_server() -> None:
    """It does not fail before it is sent: a stop goes on after a refusal."""
    with listening(Handler) as address:
        admin = admin_of(address)
        with pytest.raises(RefusedCallError, match=r"unknown: .*/m%C3%BC%20pipe/unload"):
            admin.unload(ODD_NAME)
        with pytest.raises(RefusedCallError):
            admin.load(ODD_NAME, 10)
        with pytest.raises(RefusedCallError):
            admin.infer(ODD_NAME, [])


def test_a_name_that_can_be_sent_as_it_is_is_not_quoted() -> None:
    """A stub's model may have one, too, and the server knows it by no other."""
    with listening(Handler) as address:
        admin = admin_of(address)
        assert admin.model_inputs("a+b,c:d@e%f=g") == []
        with pytest.raises(RefusedCallError, match=r"unknown: .*/a%3Fb$"):
            admin.model_inputs("a?b")


class Served:
    """What is printed of a server, with a model that the server does not know in a path."""

    http_url = "host:1"
    grpc_url = "host:2"
    metrics_url = "http://host:3/metrics"
    log_file = Path("log")
    models = (ODD_NAME, "speaks")

    def __init__(self, admin: Admin) -> None:
        self.admin = admin

    def log_of_last_start(self) -> str:
        return ""

    def unservable(self) -> dict[str, str]:
        return {}


def test_such_a_model_is_listed_and_the_example_is_of_another_one() -> None:
    out = Console(record=True, width=200)
    with listening(Handler) as address:
        models = print_welcome(cast("TritonServer", Served(admin_of(address))), out)
    assert [model.name for model in models] == [ODD_NAME, "speaks"]
    assert "/v2/models/speaks/generate_stream" in out.export_text()
