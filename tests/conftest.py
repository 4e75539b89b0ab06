"""Fixtures that several rooms' tests share."""

from collections.abc import Iterator

import pytest
from s3_server import S3Server, aws_environment, start


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A real S3 server; its credentials are in the AWS environment for as long as the session lasts."""
    server, process = start(tmp_path_factory.mktemp("s3"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in aws_environment().items():
            patch.setenv(name, value)
        for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL"):
            patch.delenv(name, raising=False)
        yield server
    process.terminate()
    process.wait(timeout=20)
