"""The large cases of the tests on a GPU, and which cases the backend "gluon" runs."""

from tritonpack.testing import Case

HOPPER_HEAD_DIMS = (64, 128, 256)

LARGE = (
    Case("long", (4096,), heads=8, kv_heads=2, head_dim=128),
    Case("ordinary", (700, 130, 0, 1500, 63, 1, 900), heads=8, kv_heads=2, head_dim=128, slack=77),
    Case("ordinary-64", (700, 130, 0, 1500, 63, 1, 900), heads=8, kv_heads=8, head_dim=64),
    Case("ordinary-256", (700, 130, 0, 1500, 63, 1), heads=4, kv_heads=1, head_dim=256),
    Case("tiny", (20,) * 150, heads=8, kv_heads=2, head_dim=128),
    Case("bidirectional", (700, 130, 1500), heads=8, kv_heads=2, head_dim=128, causal=False),
    Case("window", (2000, 300), heads=8, kv_heads=2, head_dim=128, window=(256, 0)),
    Case("cross", (300, 900), (1500, 200), heads=8, kv_heads=2, head_dim=128),
    Case("softcap", (700, 130, 0, 1500), heads=8, kv_heads=4, head_dim=256, softcap=50.0),
    Case("sinks", (700, 130, 0, 1500), heads=16, kv_heads=2, head_dim=64, sinks=True, window=(128, 0)),
    Case("alibi", (700, 130, 0, 1500), heads=8, kv_heads=8, head_dim=128, alibi="documents"),
    Case("dropout", (700, 130, 0, 1500), heads=8, kv_heads=2, head_dim=128, dropout_p=0.1),
    Case("everything", (700, 1, 1500), heads=8, kv_heads=2, head_dim=64, softcap=20.0, sinks=True, alibi="heads",
         dropout_p=0.1, window=(256, 0)),
    Case("values-128", (700, 130, 500), heads=8, kv_heads=8, head_dim=192, head_dim_v=128),
    Case("ordinary-512", (700, 130, 0, 500), heads=4, kv_heads=1, head_dim=512),
)  # fmt: skip


def is_plain(case: Case) -> bool:
    """Whether a case is softmax attention of documents alone, as the backend "gluon" computes it."""
    return not (case.softcap or case.sinks or case.alibi or case.dropout_p or case.head_dim_v or case.parents)
