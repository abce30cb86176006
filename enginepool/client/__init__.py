"""The client side: Pool and what it is made of."""
