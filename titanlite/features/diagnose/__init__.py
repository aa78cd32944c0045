"""What a run does when something goes wrong while it trains: find the cause, go back, or refuse to go on."""

from titanlite.features.diagnose.compilation import check_triton, explain_uncompiled
from titanlite.features.diagnose.determinism import explain_refusal, make_deterministic
from titanlite.features.diagnose.divergence import DivergenceCheck
from titanlite.features.diagnose.flight_recorder import enable_flight_recorder
from titanlite.features.diagnose.nonfinite import diagnose
from titanlite.features.diagnose.out_of_memory import explain_out_of_memory, start_memory_history, warn_of_large_mask
from titanlite.features.diagnose.spike import SpikeDetector
