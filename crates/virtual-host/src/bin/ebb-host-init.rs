//! The init of a virtual host without the rest of `ebb`, for this crate's tests.

fn main() {
    if std::process::id() == 1 {
        ebb_virtual_host::inside::init_main();
    }
    eprintln!("ebb-host-init: this is the init of a virtual host and only runs there");
    std::process::exit(2);
}
