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
