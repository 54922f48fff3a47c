"""Tests that run the ecosystem's tools on our models; a package, so that its conftest has a name of its own."""
