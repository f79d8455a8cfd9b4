//! A process with a machine's memory that it merges through a broker; it executes commands, one per
//! line.

use ebb_page_merge::Nodes;
use std::io::BufRead;
use std::path::Path;
use std::sync::Arc;

use ebb_guest_ram::{
    Backing, GuestRam, HugePages, MergeSession, Populate, RegionSpec, StableSegments,
};
use ebb_page_merge::broker::{BrokerStore, MemberConfig};
use ebb_page_merge::{Merger, Run, Settings};
use vm_memory::{Bytes, GuestAddress};

use crate::support::{LONG, PAGE};

/// Pages that are equal in all machines.
pub const COMMON: u64 = 8192;

/// Pages that no other machine has.
pub const OWN: u64 = 512;

/// The memory and its expected content.
struct Machine {
    ram: Arc<GuestRam>,
    expected: Vec<u64>,
}

impl Machine {
    fn new(number: u64) -> Self {
        let size_bytes = (COMMON + OWN) * PAGE as u64;
        let region = RegionSpec { start: GuestAddress(0), size_bytes, host_node: None };
        let ram =
            GuestRam::new(&[region], Backing::Anonymous, HugePages::Off, Populate::Lazy).unwrap();
        let own = (0..OWN).map(|page| 1 << 60 | number << 32 | page);
        let mut machine = Self { ram: Arc::new(ram), expected: Vec::new() };
        let contents: Vec<u64> = (1..=COMMON).chain(own).collect();
        for (page, &content) in contents.iter().enumerate() {
            machine.write(page, content);
        }
        machine.expected = contents;
        machine
    }

    fn write(&self, page: usize, content: u64) {
        let bytes = crate::support::page(content);
        self.ram.memory().write_slice(&bytes, GuestAddress((page * PAGE) as u64)).unwrap();
    }

    fn is_right(&self) -> bool {
        let mut found = vec![0; PAGE];
        self.expected.iter().enumerate().all(|(page, &content)| {
            self.ram.memory().read_slice(&mut found, GuestAddress((page * PAGE) as u64)).unwrap();
            found == crate::support::page(content)
        })
    }
}

/// Commands: `scan N`: N passes. `write FROM TO CONTENT`: pages FROM to TO get contents from
/// CONTENT on. `check`. `unmerge`. `renew`: uses the broker that listens at the same path now.
pub fn run(path: &Path) {
    let mut machine = Machine::new(u64::from(std::process::id()));
    let segments = StableSegments::new();
    machine.ram.enable_merging(segments.clone()).unwrap();
    let memory = MergeSession::new(machine.ram.clone()).unwrap();
    let mut config = MemberConfig::new(path.to_owned(), "web".parse().unwrap(), Nodes::Across);
    config.time_limit = LONG;
    let store = BrokerStore::connect(&config, segments.clone()).unwrap();
    let secret = store.secret();
    let settings = Settings { run: Run::Merge, ..Settings::default() };
    let mut merger = Merger::new(memory, store, secret, settings).unwrap();
    println!("\nready");
    for line in std::io::stdin().lock().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        match words[..] {
            ["scan", passes] => {
                let mut left: u32 = passes.parse().unwrap();
                while left > 0 {
                    left -= u32::from(merger.step(512).finished_pass);
                }
                let statistics = merger.statistics();
                println!("\nscanned {} {}", statistics.merged_pages, statistics.store_errors);
            }
            ["write", from, to, content] => {
                let (from, to): (usize, usize) = (from.parse().unwrap(), to.parse().unwrap());
                for (page, content) in (from..to).zip(content.parse::<u64>().unwrap()..) {
                    machine.write(page, content);
                    machine.expected[page] = content;
                }
                println!("\nwritten");
            }
            ["renew"] => {
                let store = BrokerStore::connect(&config, segments.clone()).unwrap();
                let secret = store.secret();
                merger.renew(store, secret);
                println!("\nrenewed");
            }
            ["check"] => println!("\nchecked {}", machine.is_right()),
            ["unmerge"] => {
                merger.change(Settings { run: Run::Unmerge, ..merger.settings().clone() }).unwrap();
                while !merger.step(512).finished_pass {}
                merger.store_mut().flush();
                println!("\nunmerged");
            }
            _ => panic!("the unknown command {line}"),
        }
    }
}
