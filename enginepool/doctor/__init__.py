"""`enginepool doctor`: what `serve` would meet with the same arguments, told without starting, loading or claiming anything."""
