"""A run whose optimizer packs its moments comes back bit for bit."""

from packed_moments import PackedAdamW, check_resume


def test_packed_moments_go_on_as_they_would_have(tmp_path):
    check_resume(lambda: PackedAdamW(1e-2), tmp_path)
