"""Every published manifest is one that its operator's API takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kubernetes import published, schema

each = pytest.mark.parametrize


@each("path", published.ALL, ids=published.name)
def test_its_api_takes_a_manifest_with_all_its_fields(path: Path) -> None:
    documents = published.documents(path)
    assert documents
    assert [text for document in documents for text in schema.wrong_in(document)] == []


def test_what_is_no_object_is_refused() -> None:
    assert schema.wrong_in([]) == schema.wrong_in(None) == ["this is no object of Kubernetes: it has no kind"]
