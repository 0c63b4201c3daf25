// The entry point: everything else is in app/, so that tests can link it.
int main() { return 0; }
