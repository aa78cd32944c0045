"""Proof of what a run trained: a certificate in every checkpoint, and checks of any folder.

Needs only torch and safetensors.
"""

from titanlite.features.verify.certificate import digest_base, read_certificate
from titanlite.features.verify.checks import Report, verify_folder
