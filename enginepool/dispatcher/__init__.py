"""The dispatcher process: one light loop that supervises workers and moves items between clients and them."""
