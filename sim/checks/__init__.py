"""What a program can be checked for while its ranks run: races, copies that differ, the same results again."""
