from __future__ import annotations

import itertools

from quire.request import cache_scope


def test_a_scope_is_of_one_length_and_tells_salt_from_tenant() -> None:
    assert cache_scope(None) is None
    salts = (None, "a", "1:a", "+", "1:a+b", "\ud800", "x" * 1024)
    tenants = ("", "a", "b", "a+", "1:a")
    scopes = [cache_scope(salt, tenant) for salt, tenant in itertools.product(salts, tenants)]
    assert len(set(scopes)) == len(scopes)
    assert {len(scope) for scope in scopes if scope is not None} == {32}
