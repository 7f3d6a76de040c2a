"""A failed start is explained in a few lines, taken from the server's own log."""

from jitney_server.start_failure import (
    explain_failure,
    failed_models,
    is_port_taken,
    without_frames_and_repetitions,
)

# ruff: noqa: E501 - lines of a real log
LOG = r"""W1120 18:38:58.534160 11501 pinned_memory_manager.cc:273] "Unable to allocate pinned memory"
E1120 18:38:58.534263 11501 server.cc:241] "CudaDriverHelper has not been initialized."
I1120 18:38:58.535172 11501 model_lifecycle.cc:472] "loading: bad:1"
E1120 18:39:00.531788 11501 model_lifecycle.cc:642] "failed to load 'bad' version 1: Internal: ValueError: truncated: 3 of 5 bytes\nsecond line\n\nAt:\n  /srv/bad/1/model.py(3): initialize\n"
E1120 18:39:00.631788 11501 model_repository_manager.cc:1460] "Poll failed for model directory 'x'"
E1120 18:39:00.731788 11501 model_lifecycle.cc:642] "failed to load 'worse' version 2: Unsupported: no"
I1120 18:39:00.531803 11501 model_lifecycle.cc:777] "failed to load 'bad'"
error: creating server: Internal - failed to load all models
"""


def test_each_failed_model_is_named_with_its_reason_and_without_traceback() -> None:
    assert failed_models(LOG) == {
        "bad": "Internal: ValueError: truncated: 3 of 5 bytes\n    second line",
        "worse": "Unsupported: no",
    }
    text = explain_failure(LOG, 1)
    assert text.startswith("the server stopped because 2 models failed to load:")
    assert "model.py" not in text
    assert len(text.splitlines()) == 4


def test_without_a_failed_model_the_error_lines_speak() -> None:
    log = "\n".join(line for line in LOG.splitlines() if "failed to load '" not in line)
    text = explain_failure(log, 1)
    assert text.splitlines()[0] == "the server exited with status 1:"
    assert "creating server: Internal" in text
    assert "CudaDriverHelper" not in text, "printed on every machine without a GPU"


def test_without_any_error_line_the_last_lines_speak() -> None:
    assert "ended by SIGKILL" in explain_failure("", -9)
    assert "nothing" in explain_failure("", -9)
    assert explain_failure("one\ntwo", 3).splitlines()[1:] == ["  one", "  two"]


# Models that the server does not even try to load, and a warm-up of three requests.
UNTRIED = r"""E1120 18:38:58.168306 1 model_repository_manager.cc:1460] "Poll failed for model directory 'garbled': failed to read text proto from /srv/garbled/config.pbtxt"
E1120 18:38:58.186433 1 model_repository_manager.cc:724] "failed to load model 'empty': at least one version must be available under the version policy of model 'empty'"
E1120 18:38:58.760879 1 model_repository_manager.cc:703] "Invalid argument: ensemble lost contains models that are not available or ambiguous: nowhere"
E1120 18:38:58.110440 1 model_lifecycle.cc:642] "failed to load 'warm' version 1: Invalid argument: failed to run warmup sample 'w': INVALID_ARGUMENT: idx=9; INVALID_ARGUMENT: idx=9; INVALID_ARGUMENT: idx=9; "
E1120 18:38:58.861291 1 model_repository_manager.cc:703] "Invalid argument: ensemble 'ens' depends on 'warm' which has no loaded version. Model 'warm' loading failed with error: version 1 is at UNAVAILABLE state: Internal: no\n\nAt:\n  /srv/model.py(3): initialize\n;"
"""


def test_models_that_were_never_tried_have_a_reason_too() -> None:
    assert failed_models(UNTRIED) == {
        "garbled": "failed to read text proto from /srv/garbled/config.pbtxt",
        "empty": "at least one version must be available under the version policy of model 'empty'",
        "lost": "ensemble lost contains models that are not available or ambiguous: nowhere",
        "warm": "Invalid argument: failed to run warmup sample 'w': INVALID_ARGUMENT: idx=9",
        "ens": "ensemble 'ens' depends on 'warm' which has no loaded version. Model 'warm' loading "
        "failed with error: version 1 is at UNAVAILABLE state: Internal: no",
    }


def test_a_warm_up_says_an_error_once() -> None:
    assert explain_failure(UNTRIED, 1).count("idx=9") == 1
    sample = "warmup sample 'w': "
    assert without_frames_and_repetitions(f"{sample}a; b; a; b; c") == f"{sample}a; b; c"
    assert without_frames_and_repetitions("") == ""


def test_only_the_server_itself_says_that_a_port_is_taken() -> None:
    """A model may print what it likes."""
    line = """E1120 18:39:00.1 1 main.cc:355] "failed to start HTTP service: Unavailable - """
    assert is_port_taken(f"{line}Socket '127.0.0.1:8000' already in use \"")
    assert not is_port_taken("the cache is already in use")


BROKEN = r"""[libprotobuf ERROR google/protobuf/text_format.cc:337] Error parsing text-format inference.ModelConfig: 2:16: Message type "inference.ModelConfig" has no field named "max_batch_sise".
E1120 18:38:58.168306 1 model_repository_manager.cc:1460] "Poll failed for model directory 'typo': failed to read text proto from /srv/typo/config.pbtxt"
[libprotobuf ERROR google/protobuf/text_format.cc:337] Error parsing text-format inference.ModelConfig: 2:16: Message type "inference.ModelConfig" has no field named "max_batch_sise".
E1120 18:38:58.168366 1 model_repository_manager.cc:1460] "Poll failed for model directory 'typo': failed to read text proto from /srv/typo/config.pbtxt"
[libprotobuf ERROR google/protobuf/text_format.cc:337] Error parsing text-format inference.ModelConfig: 7:1: Expected "}".
E1120 18:38:58.168406 1 model_repository_manager.cc:1460] "Poll failed for model directory 'open': failed to read text proto from /srv/open/config.pbtxt"
E1120 18:38:58.186433 1 model_repository_manager.cc:724] "failed to load model 'empty': at least one version must be available under the version policy of model 'empty'"
"""


def test_a_broken_configuration_is_named_with_line_and_column() -> None:
    assert failed_models(BROKEN) == {
        "typo": "failed to read text proto from /srv/typo/config.pbtxt: line 2, column 16: Message "
        'type "inference.ModelConfig" has no field named "max_batch_sise".',
        "open": "failed to read text proto from /srv/open/config.pbtxt: line 7, column 1: "
        'Expected "}".',
        "empty": "at least one version must be available under the version policy of model 'empty'",
    }


REFUSED = """/opt/tritonserver: unrecognized option '--nonsense=1'

Usage: tritonserver [options]
  --help
	Print usage

Logging:
  --log-verbose <integer>
"""


def test_why_an_option_was_refused_stands_first_and_the_usage_nowhere() -> None:
    assert explain_failure(REFUSED, 1).splitlines() == [
        "the server exited with status 1:",
        "  /opt/tritonserver: unrecognized option '--nonsense=1'",
    ]
