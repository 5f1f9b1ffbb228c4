"""Is a difference a bug or numerics? Checks that any target, drafter and rule may be put through.

* `greedy_text`: greedy text with a draft against plain decoding; a tie flip or a fault;
* `exact_law`: the output law of a verification rule, summed exactly in float64;
* `chi_square`: what the whole compiled loop writes against the target's enumerated law;
* `coupled_differences`: texts of a coupled rule that are not the plain ones;
* `certify`: all of them for a loaded target and a draft by name, as `jspec certify` does.

A drafter of one's own, with any target of 5 to 8 tokens:

>>> from jspec.certify.tiny import tiny
>>> from jspec.sampling.drafters.model import model
>>> from jspec.sampling.verify import token
>>> draft, draft_params = tiny(1)
>>> found = chi_square(*tiny(0), model(draft, 3), draft_params, token, rows=1000)
>>> min(found.p_values) > 1e-6
True
"""

from jspec.certify.greedy import Difference, Greedy, greedy_text
from jspec.certify.loop import ChiSquare, chi_square, coupled_differences
from jspec.certify.report import Certificate, certify
from jspec.certify.rules import Exact, exact_law

__all__ = [
    "Certificate",
    "ChiSquare",
    "Difference",
    "Exact",
    "Greedy",
    "certify",
    "chi_square",
    "coupled_differences",
    "exact_law",
    "greedy_text",
]
