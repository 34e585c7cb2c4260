"""Finding a tokenizer offline: a file, a directory, or a model name in the hub cache; nothing is fetched, nothing climbs out."""

import pytest
from headrace.codec.errors import ValidationError
from headrace.runtime.server_args import hub_cache, resolve_tokenizer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub cache with org/name at one commit, reachable as branch main and as refs/pr/1."""
    cache = tmp_path / "hub"
    repo = cache / "models--org--name"
    snapshot = repo / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "tokenizer.json").write_text("{}")
    (repo / "refs" / "refs" / "pr").mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    (repo / "refs" / "refs" / "pr" / "1").write_text(COMMIT + "\n")
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    monkeypatch.chdir(tmp_path)
    return cache


def test_a_file_is_itself_and_a_directory_gives_its_tokenizer_json(tmp_path):
    file = tmp_path / "other-name.json"
    file.write_text("{}")
    assert resolve_tokenizer(file) == file
    assert resolve_tokenizer(str(file), "any-revision") == file
    with pytest.raises(ValidationError, match=r"holds no tokenizer\.json"):
        resolve_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert resolve_tokenizer(tmp_path) == tmp_path / "tokenizer.json"


@pytest.mark.parametrize("revision", [None, "main", COMMIT, "refs/pr/1"])
def test_a_model_name_is_found_in_the_hub_cache(hub, revision):
    assert (
        resolve_tokenizer("org/name", revision) == hub / "models--org--name" / "snapshots" / COMMIT / "tokenizer.json"
    )


def test_a_name_without_an_organisation_is_found_too(hub):
    (hub / "models--gpt2" / "snapshots" / "main").mkdir(parents=True)
    file = hub / "models--gpt2" / "snapshots" / "main" / "tokenizer.json"
    file.write_text("{}")
    assert resolve_tokenizer("gpt2") == file


def test_a_local_directory_wins_over_the_hub_cache(hub, tmp_path):
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "org" / "name" / "tokenizer.json").write_text("{}")
    assert resolve_tokenizer("org/name").read_text() == "{}"
    assert "hub" not in resolve_tokenizer("org/name").parts


@pytest.mark.parametrize(
    ("path", "revision", "field", "words"),
    [
        ("org/other", None, "tokenizer_path", "hub cache has no model of that name"),
        ("/no/such/file", None, "tokenizer_path", "no such file"),
        ("a/b/c", None, "tokenizer_path", "no such file"),
        ("../name", None, "tokenizer_path", "no such file"),
        ("", None, "tokenizer_path", "names no file"),
        ("a\0b", None, "tokenizer_path", "names no file"),
        ("x" * 5000, None, "tokenizer_path", "too long"),
        ("org/name", "dev", "revision", "no revision 'dev'"),
        ("org/name", "../../x", "revision", "not the name of a revision"),
        ("org/name", "/main", "revision", "not the name of a revision"),
        ("org/name", "", "revision", "not the name of a revision"),
    ],
)
def test_what_is_not_there_is_one_clear_error(hub, path, revision, field, words):
    with pytest.raises(ValidationError) as caught:
        resolve_tokenizer(path, revision)
    assert caught.value.field == field
    assert words in caught.value.message.lower()
    assert "\n" not in caught.value.message


def test_a_revision_cannot_name_a_file_outside_the_cache(hub, tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    (hub / "models--org--name" / "refs" / "evil").write_text("../../..")
    with pytest.raises(ValidationError, match="no revision"):
        resolve_tokenizer("org/name", "evil")


def test_a_snapshot_without_a_tokenizer_says_so(hub):
    (hub / "models--org--name" / "snapshots" / COMMIT / "tokenizer.json").unlink()
    with pytest.raises(ValidationError, match=r"has no tokenizer\.json"):
        resolve_tokenizer("org/name")


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub_cache() == tmp_path / ".cache" / "huggingface" / "hub"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert hub_cache() == tmp_path / "xdg" / "huggingface" / "hub"
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    assert hub_cache() == tmp_path / "home" / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "c"))
    assert hub_cache() == tmp_path / "c"
