"""A collective as data: programs, what they are laid out on, proofs and simulations of them. Pure."""
