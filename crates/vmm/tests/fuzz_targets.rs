//! The fuzz targets in `fuzz/` compile with the stable compiler, do something, and are listed where
//! they must be. Building them as they are run needs a nightly compiler and libFuzzer.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

// The targets name the crate of their macro.
extern crate self as libfuzzer_sys;

/// In place of libFuzzer's: the target as a function.
#[macro_export]
macro_rules! fuzz_target {
    (|$data:ident: &[u8]| $body:expr) => {
        pub fn run($data: &[u8]) {
            $body
        }
    };
}

#[allow(unused_attributes, reason = "each is a program of its own when it is fuzzed")]
#[path = "../../../fuzz/fuzz_targets"]
mod fuzz_targets {
    pub mod api_descriptors;
    pub mod api_request;
    pub mod balloon_config;
    pub mod balloon_deflate;
    pub mod balloon_deflate_message;
    pub mod balloon_hinting;
    pub mod balloon_host_request;
    pub mod balloon_inflate;
    pub mod balloon_inflate_message;
    pub mod balloon_reporting;
    pub mod balloon_statistics;
    pub mod broker_client;
    pub mod broker_frame;
    pub mod broker_server;
    pub mod companion_replies;
    pub mod companion_requests;
    pub mod exec_archive;
    pub mod exec_frames;
    pub mod firecracker_request;
    pub mod fork_requests;
    pub mod host_decisions;
    pub mod kernel_image;
    pub mod libvirt_messages;
    pub mod migration_garbage;
    pub mod migration_receiver;
    pub mod migration_records;
    pub mod mmds_frames;
    pub mod net_chains;
    pub mod option_texts;
    pub mod qcow2_images;
    pub mod qmp_messages;
    pub mod ram_image;
    pub mod rate_limits;
    pub mod session_address;
    pub mod session_destination;
    pub mod session_frame;
    pub mod session_hello;
    pub mod session_source;
    pub mod session_tls_files;
    pub mod snapshot;
    pub mod tracker_recording;
    pub mod vmlinux_extraction;
    pub mod vsock_chains;
}

/// Lists targets by name.
macro_rules! targets {
    ($($name:ident),* $(,)?) => {
        [$((stringify!($name), fuzz_targets::$name::run as fn(&[u8]))),*]
    };
}

/// A target by name.
type Target = (&'static str, fn(&[u8]));

/// All targets.
const TARGETS: [Target; 43] = targets![
    api_descriptors,
    api_request,
    balloon_config,
    balloon_deflate,
    balloon_deflate_message,
    balloon_hinting,
    balloon_host_request,
    balloon_inflate,
    balloon_inflate_message,
    balloon_reporting,
    balloon_statistics,
    broker_client,
    broker_frame,
    broker_server,
    companion_replies,
    companion_requests,
    exec_archive,
    exec_frames,
    firecracker_request,
    fork_requests,
    host_decisions,
    kernel_image,
    libvirt_messages,
    migration_garbage,
    migration_receiver,
    migration_records,
    mmds_frames,
    net_chains,
    option_texts,
    qcow2_images,
    qmp_messages,
    ram_image,
    rate_limits,
    session_address,
    session_destination,
    session_frame,
    session_hello,
    session_source,
    session_tls_files,
    snapshot,
    tracker_recording,
    vmlinux_extraction,
    vsock_chains,
];

/// One test, so that no other thread of this process opens files meanwhile.
#[test]
fn every_target_is_listed_and_runs() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz");
    let names: BTreeSet<_> = TARGETS.iter().map(|(name, _)| (*name).to_owned()).collect();
    let files = fs::read_dir(directory.join("fuzz_targets")).unwrap();
    let files = files.map(|file| file.unwrap().path().file_stem().unwrap().to_owned());
    let files: BTreeSet<_> = files.map(|name| name.into_string().unwrap()).collect();
    assert_eq!(files, names, "fuzz_targets/ differs from this test");

    let manifest = fs::read_to_string(directory.join("Cargo.toml")).unwrap();
    let programs = manifest.split("[[bin]]").skip(1).map(|program| {
        let value = |key| program.lines().find_map(|line: &str| line.strip_prefix(key)).unwrap();
        let name = value("name = ").trim_matches('"');
        assert_eq!(value("path = "), format!("\"fuzz_targets/{name}.rs\""));
        name.to_owned()
    });
    assert_eq!(programs.collect::<BTreeSet<_>>(), names, "Cargo.toml differs from this test");

    let readme = fs::read_to_string(directory.join("README.md")).unwrap();
    // The first column of the table: names, some of them with a star at the end.
    let rows = readme.lines().filter_map(|line| line.strip_prefix("| `")?.split(" |").next());
    let listed: Vec<_> = rows.flat_map(|cell| cell.split(", ")).collect();
    let listed: Vec<_> = listed.iter().map(|name| name.trim_matches('`')).collect();
    let fits = |listed: &str, name: &str| match listed.strip_suffix('*') {
        Some(begin) => name.starts_with(begin),
        None => name == listed,
    };
    for name in &names {
        assert!(listed.iter().any(|entry| fits(entry, name)), "README.md lacks {name}");
    }
    for entry in &listed {
        assert!(names.iter().any(|name| fits(entry, name)), "README.md lists {entry}");
    }

    let open_files = || fs::read_dir("/proc/self/fd").unwrap().count();
    for (name, run) in TARGETS {
        // What is made only once, as a source of random numbers.
        run(&[]);
        let before = open_files();
        for data in [&b""[..], &[7; 9], b"{}", &[0; 64], &[255; 64], &[1, 4, 1, 4, 2, 8, 5, 7]] {
            run(data);
            assert_eq!(open_files(), before, "{name} leaves a file open");
        }
    }
}
