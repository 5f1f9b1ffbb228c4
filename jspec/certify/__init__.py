"""Is a difference a bug or numerics? Checks that any target, drafter and verifier may be put through.

* `greedy_text`: greedy text with a draft against plain decoding; a tie flip or a fault;
* `exact_distribution`: the output distribution of a verifier, summed exactly in float64;
* `chi_square`: what the whole compiled loop writes against the target's enumerated distribution;
* `coupled_differences`: texts of a coupled verifier that are not the plain ones;
* `certify`: all of them for a loaded target and a draft by name, as `jspec certify` does.

A drafter of one's own, with any target of 5 to 8 tokens:

>>> from jspec.certify.tiny import tiny
>>> from jspec.sampling.drafters import draft_model
>>> from jspec.sampling.verifiers import token
>>> draft, draft_params = tiny(1)
>>> found = chi_square(*tiny(0), draft_model(draft, 3), draft_params, token, rows=1000)
>>> min(found.p_values) > 1e-6
True
"""

from jspec.certify.exact import Exact, exact_distribution
from jspec.certify.greedy import Difference, Greedy, greedy_text
from jspec.certify.loop import ChiSquare, chi_square, coupled_differences
from jspec.certify.report import Certificate, certify

__all__ = [
    "Certificate",
    "ChiSquare",
    "Difference",
    "Exact",
    "Greedy",
    "certify",
    "chi_square",
    "coupled_differences",
    "exact_distribution",
    "greedy_text",
]
