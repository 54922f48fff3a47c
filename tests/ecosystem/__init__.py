"""Tests that run the tools of the ecosystem, as a package: its conftest must not shadow the one above."""
