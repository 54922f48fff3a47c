"""Tests that run the ecosystem's tools on our models; a package, for a second module `conftest` shadows one."""
