"""The second study: does BAPO help where its controller acts? Design, gates and verdicts."""
