"""The Hub of the tests speaks to the real client; what is published and loaded through it means something."""

from pathlib import Path

import pytest
from hub_server import Fault, HubServer, pointed_at
from huggingface_hub import CommitOperationAdd, HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError


@pytest.fixture
def hub(tmp_path):
    with HubServer() as server, pointed_at(server, tmp_path / "home"):
        yield server


def commit(files, repo_id="ann/cats", **options):
    operations = [CommitOperationAdd(name, content) for name, content in files.items()]
    return HfApi().create_commit(repo_id, operations, commit_message="words", **options)


@pytest.mark.parametrize("kind", ["model", "dataset"])
def test_files_come_back_as_they_were(hub, kind):
    HfApi().create_repo("ann/cats", repo_type=kind, private=True)
    files = {"a.txt": b"small", "w.safetensors": b"large" * 1000}
    first = commit(files, repo_type=kind)
    commit({"a.txt": b"changed"}, repo_type=kind)
    folder = Path(snapshot_download("ann/cats", repo_type=kind))
    assert (folder / "w.safetensors").read_bytes() == files["w.safetensors"]
    old = hf_hub_download("ann/cats", "a.txt", repo_type=kind, revision=first.oid)
    assert Path(old).read_bytes() == b"small"
    assert hub.repos[kind, "ann/cats"].messages == ["words", "words"]


def test_private_repositories_are_for_those_with_a_token(hub, tmp_path):
    HfApi().create_repo("ann/cats", private=True)
    with pointed_at(hub, tmp_path / "stranger", token=None):
        with pytest.raises(RepositoryNotFoundError):
            HfApi().model_info("ann/cats")
        with pytest.raises(HfHubHTTPError):
            HfApi().create_repo("bob/dogs")
    assert list(hub.repos) == [("model", "ann/cats")]


def test_faults_come_as_often_as_asked(hub):
    HfApi().create_repo("ann/cats")
    hub.faults = [Fault("POST", "/commit/", 503)]
    with pytest.raises(HfHubHTTPError):
        commit({"a.txt": b"1"})
    assert commit({"a.txt": b"1"}).oid in hub.repos["model", "ann/cats"].commits
