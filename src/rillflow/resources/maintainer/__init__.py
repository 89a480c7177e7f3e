"""The maintainer: keeps as many rollout nodes as the balance report asks for."""
