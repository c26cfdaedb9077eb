"""What a recorded profile says of replayed graphs: read, attribute, find, show. Needs no torch."""
