//! Tests of `ebb run` on real Linux guests.
//!
//! Where KVM runs Linux well, the tests run directly. Otherwise this program boots a virtual host
//! (crate `ebb-virtual-host`), copies itself into it and runs there with the same arguments. The
//! guests' kernel is Debian's stock one, their init is the guest agent (crate `ebb-agent`).
//!
//! `cargo test -p ebb --test guests -- NAME` runs the tests whose names contain NAME; `--list`
//! lists them. The agent is a separate program: run `cargo build -p ebb-agent` first.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod api;
mod backing;
mod bad_input;
mod boot;
mod clock;
mod clocks;
mod devices;
mod disks;
mod driver;
mod ends;
mod exec;
mod false_agent;
mod firecracker;
mod fork;
mod fork_alone;
mod fork_bad;
mod forked;
mod guest;
mod harness;
mod host;
mod hostile;
mod hostile_driver;
mod inflate;
mod isolation;
mod kills;
mod leases;
mod lifecycle;
mod merge;
mod merge_bad;
mod merge_domains;
mod merge_forks;
mod merge_kernel;
mod merge_limits;
mod merge_stress;
mod merge_support;
mod migration;
mod migration_refused;
mod migration_unknown;
mod module;
mod module_alone;
mod module_hibernation;
mod module_kernel;
mod module_reclaim;
mod module_recordings;
mod module_support;
mod module_trackers;
mod moved;
mod net;
mod park;
mod place;
mod planted_bug;
mod reporting;
mod saved;
mod saving;
mod setup;
mod sigterm;
mod snapshot;
mod statistics;
mod tiny_kernel;
mod trace;
mod trim;
mod vsock;
mod working_set;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Trial};

use harness::{Test, World};

/// All tests, file by file.
const TESTS: &[&[Test]] = &[
    boot::TESTS,
    inflate::TESTS,
    reporting::TESTS,
    trim::TESTS,
    backing::TESTS,
    statistics::TESTS,
    lifecycle::TESTS,
    leases::TESTS,
    host::TESTS,
    ends::TESTS,
    devices::TESTS,
    exec::TESTS,
    net::TESTS,
    park::TESTS,
    vsock::TESTS,
    working_set::TESTS,
    disks::TESTS,
    firecracker::TESTS,
    driver::TESTS,
    module::TESTS,
    module_alone::TESTS,
    module_hibernation::TESTS,
    module_kernel::TESTS,
    module_reclaim::TESTS,
    module_recordings::TESTS,
    module_trackers::TESTS,
    api::TESTS,
    isolation::TESTS,
    planted_bug::TESTS,
    bad_input::TESTS,
    hostile::TESTS,
    fork::TESTS,
    fork_alone::TESTS,
    fork_bad::TESTS,
    snapshot::TESTS,
    saving::TESTS,
    kills::TESTS,
    sigterm::TESTS,
    clock::TESTS,
    migration::TESTS,
    migration_refused::TESTS,
    migration_unknown::TESTS,
    merge::TESTS,
    merge_domains::TESTS,
    merge_forks::TESTS,
    merge_kernel::TESTS,
    merge_limits::TESTS,
    merge_bad::TESTS,
    merge_stress::TESTS,
];

fn main() -> ExitCode {
    if std::process::id() == 1 {
        ebb_virtual_host::inside::init_main();
    }
    let words: Vec<String> = std::env::args().collect();
    if let [_, hostile_driver::ARGUMENT, seed, rounds] =
        words.iter().map(String::as_str).collect::<Vec<_>>()[..]
    {
        return hostile_driver::main(seed, rounds);
    }
    if words.get(1).is_some_and(|first| first == false_agent::ARGUMENT) {
        return false_agent::main();
    }
    if words.get(1).is_some_and(|first| first == host::ARGUMENT) {
        let words = ["/proc/self/exe", host::ARGUMENT];
        return ebbd::program::main(&words, std::env::args_os().skip(2).collect());
    }
    if let Some((hostile_driver::attacker::ARGUMENT, rest)) =
        words.get(1).map(|first| (first.as_str(), &words[2..]))
    {
        return hostile_driver::attacker::main(rest);
    }
    let mut arguments = Arguments::from_args();
    let selected: Vec<_> = names().filter(|name| is_selected(&arguments, name)).collect();
    if arguments.list || selected.is_empty() {
        return libtest_mimic::run(&arguments, trials(|| None)).exit_code();
    }
    match place::choose() {
        Ok(place::Place::Here(world, _files)) => {
            // In an emulated host, concurrent tests compete for processors and memory and exceed
            // their time limits. `--test-threads 2` is for fast machines.
            arguments.test_threads.get_or_insert(1);
            if let harness::Machine::Emulated(_) = world.machine {
                // For monitors that connect over TCP; the host's init leaves it down.
                let _ = std::process::Command::new(&world.busybox)
                    .args(["ifconfig", "lo", "up"])
                    .status();
            }
            let conclusion = libtest_mimic::run(&arguments, trials(|| Some(world.clone())));
            match place::leave_results() {
                Ok(()) => conclusion.exit_code(),
                Err(problem) => {
                    eprintln!("guests: {problem}");
                    ExitCode::FAILURE
                }
            }
        }
        Ok(place::Place::VirtualHost(host)) => host.run_again(&selected),
        Err(problem) => {
            eprintln!("guests: {problem}");
            ExitCode::FAILURE
        }
    }
}

/// All tests in one list.
fn tests() -> impl Iterator<Item = &'static Test> {
    TESTS.iter().copied().flatten()
}

/// Names of all tests.
fn names() -> impl Iterator<Item = &'static str> {
    tests().map(Test::name)
}

fn trials(world: impl Fn() -> Option<World>) -> Vec<Trial> {
    let only = place::only();
    let wanted = |test: &&Test| {
        only.as_ref().is_none_or(|names| names.iter().any(|name| name == test.name()))
    };
    tests().filter(wanted).map(|test| test.trial(world())).collect()
}

/// Whether libtest-mimic would run the test; a virtual host is started only if it runs any.
fn is_selected(arguments: &Arguments, name: &str) -> bool {
    let matches = |pattern: &String| {
        if arguments.exact { name == pattern } else { name.contains(pattern.as_str()) }
    };
    arguments.filter.as_ref().is_none_or(matches) && !arguments.skip.iter().any(matches)
}
