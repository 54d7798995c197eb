"""The store that tests of repair damage, made once."""

from __future__ import annotations

import pytest

from tests.repair.world import Objects, Whole, build


@pytest.fixture(scope="session")
def whole() -> Whole:
    return build()


@pytest.fixture
def here(whole: Whole) -> Objects:
    return Objects("here", whole.objects)


@pytest.fixture
def there(whole: Whole) -> Objects:
    return Objects("there", whole.objects)
