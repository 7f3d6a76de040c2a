"""Addresses without their keys."""

import pytest
from jitney.errors import InvalidArgumentError
from jitney_jobs.addresses import name_of_output, text_without_keys, without_keys
from jitney_jobs.job import job_without_keys
from jitney_jobs.job_making import make_job
from jitney_jobs.rows import reason
from jitney_jobs.storage import file_system


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("s3://KEY:SE%2FCRET@bucket/in?region=eu", "s3://bucket/in?region=eu"),
        ("s3://KEY@bucket/in", "s3://bucket/in"),
        ("s3://KEY:SE/C+RET@bucket/in", "s3://bucket/in"),
        ("s3://bucket/in?access_key=KEY&secret_key=X&scheme=http", "s3://bucket/in?scheme=http"),
        ("http://user:pw@host:80/x", "http://host:80/x"),
        ("https://TOKEN@host/x", "https://host/x"),
        (
            "https://b.s3.example/x?X-Amz-Expires=9&X-Amz-Credential=K&X-Amz-Signature=S"
            "&X-Amz-Security-Token=T&versionId=1#part",
            "https://b.s3.example/x?X-Amz-Expires=9&versionId=1#part",
        ),
        ("https://a.blob.example/c?sv=1&sig=S&se=2", "https://a.blob.example/c?sv=1&se=2"),
        ("https://h/x?Expires=1&Signature=S&AWSAccessKeyId=K", "https://h/x?Expires=1"),
        ("https://h/x?API%5Fkey=K", "https://h/x"),
        ("abfss://:SECRET@account/x", "abfss://account/x"),
        # What only looks like a key, or is part of the name.
        ("http://host:80/x@v1", "http://host:80/x@v1"),
        ("http://[::1]:80/x@v1", "http://[::1]:80/x@v1"),
        ("abfss://container@account.example/x", "abfss://container@account.example/x"),
        ("gs://anonymous@bucket/x", "gs://anonymous@bucket/x"),
        ("hdfs://me@host:8020/x", "hdfs://me@host:8020/x"),
        ("s3://bucket/a b.jsonl", "s3://bucket/a b.jsonl"),
        ("/folder/a@b?key=1", "/folder/a@b?key=1"),
    ],
)
def test_keys_are_left_out(address: str, shown: str) -> None:
    assert without_keys(address) == shown


def test_keys_are_left_out_of_running_text() -> None:
    text = "Cannot parse 's3://K:a/b@bucket/in', nor \"http://u:p@h:1/?token=x\" (s3://k:s@b)"
    assert text_without_keys(text) == "Cannot parse 's3://bucket/in', nor \"http://h:1/\" (s3://b)"
    assert reason(OSError("at http://u:p@h/x")) == "OSError: at http://h/x"


def test_errors_of_settings_and_storage_have_no_keys() -> None:
    with pytest.raises(InvalidArgumentError, match=r"^output is 's3://bucket/in/out', but must be"):
        make_job({"input": "s3://K:S@bucket/in", "output": "s3://K:S@bucket/in/out", "model": "m"})
    with pytest.raises(InvalidArgumentError) as refused:
        file_system("s3://KEY:SE/CRET@bucket/in")
    assert "CRET" not in str(refused.value)


def test_the_name_of_an_output_is_its_last_word() -> None:
    assert name_of_output("s3://K:S@bucket/nightly/?endpoint_override=h:1") == "nightly"
    assert name_of_output("/data/out") == "out"


def test_a_job_is_stored_without_the_keys_of_any_input() -> None:
    job = make_job(
        {
            "input": ["s3://KEY:SECRET@bucket/a", "@s3://KEY:SECRET@bucket/l.txt", "/b"],
            "output": "s3://KEY:SECRET@bucket/out",
            "model": "m",
        }
    )
    stored = job_without_keys(job)
    assert [stored.input, *stored.more_inputs] == ["s3://bucket/a", "@s3://bucket/l.txt", "/b"]
    assert stored.output == "s3://bucket/out"
