//! The init of a virtual host without the rest of `ebb`: what this crate's own tests boot.

fn main() {
    if std::process::id() == 1 {
        ebb_virtual_host::inside::init_main();
    }
    eprintln!("ebb-host-init: this is the init of a virtual host and does nothing elsewhere");
    std::process::exit(2);
}
