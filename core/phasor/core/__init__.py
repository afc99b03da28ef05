"""What every process of Phasor shares: configuration, ids, identity, requests, errors, the clock.

Standard library and pydantic only; imports nothing else of Phasor.
"""
