"""Head merging: halve the heads of a trained softmax model by merging every two into one mixture-key head."""

from __future__ import annotations

try:
    import transformers  # noqa: F401
except ImportError:
    raise ImportError("mgk.merge needs Transformers 5: pip install 'mgk[hf]'") from None

from mgk.merge.merge import MergeReport, merge_heads
from mgk.merge.tuning import Imitation, finetune, mean_loss

__all__ = ["Imitation", "MergeReport", "finetune", "mean_loss", "merge_heads"]
