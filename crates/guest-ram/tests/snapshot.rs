//! Saving and restoring guest memory, compared with a plain model of memory.

#![allow(clippy::unwrap_used, reason = "a test")]

use std::fs::File;

use ebb_abi::Pfn;
use ebb_guest_ram::{Backing, GuestRam, GuestRange, HugePages, Populate, RamImage, RegionSpec};
use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress};

const PAGE: u64 = 4096;
/// Offset of the memory in its file in these tests.
const FILE_OFFSET: u64 = 3 * PAGE;
/// First pages and sizes in pages of the regions: two that adjoin, and one far away.
const REGIONS: [(u64, u64); 3] = [(0, 300), (300, 200), (1 << 20, 524)];
const PAGES: usize = 1024;

fn specs() -> Vec<RegionSpec> {
    let spec = |&(start, pages): &(u64, u64)| RegionSpec {
        start: GuestAddress(start * PAGE),
        size_bytes: pages * PAGE,
        host_node: None,
    };
    REGIONS.iter().map(spec).collect()
}

/// Guest page of a page index over all regions.
fn pfn(index: usize) -> u64 {
    let mut rest = index as u64;
    for (start, pages) in REGIONS {
        if rest < pages {
            return start + rest;
        }
        rest -= pages;
    }
    panic!("page {index} is not in memory")
}

/// The first and last byte of each page.
type Model = Vec<u8>;

fn write(ram: &GuestRam, model: &mut Model, index: usize, value: u8) {
    model[index] = value;
    for offset in [0, PAGE - 1] {
        ram.memory().write_obj(value, GuestAddress(pfn(index) * PAGE + offset)).unwrap();
    }
}

fn content(ram: &GuestRam) -> Model {
    let mut page = vec![0_u8; PAGE as usize];
    (0..PAGES)
        .map(|index| {
            ram.memory().read_slice(&mut page, GuestAddress(pfn(index) * PAGE)).unwrap();
            assert!(page[1..page.len() - 1].iter().all(|byte| *byte == 0));
            assert_eq!(page[0], page[page.len() - 1]);
            page[0]
        })
        .collect()
}

fn save(ram: &GuestRam) -> (File, RamImage) {
    let file = tempfile::tempfile().unwrap();
    let mut done = Vec::new();
    let image = ram.save(&file, FILE_OFFSET, &mut |bytes| done.push(bytes)).unwrap();
    assert_eq!(done, [ram.size_bytes()]);
    assert_eq!(file.metadata().unwrap().len(), FILE_OFFSET + ram.size_bytes());
    let text = serde_json::to_string(&image).unwrap();
    let image: RamImage = serde_json::from_str(&text).unwrap();
    image.verify(&file, FILE_OFFSET, &mut |_| {}).unwrap();
    (file, image)
}

fn restore(file: &File, image: &RamImage) -> GuestRam {
    GuestRam::restore(&specs(), HugePages::On, file.try_clone().unwrap(), FILE_OFFSET, image)
        .unwrap()
}

#[derive(Clone, Debug)]
enum Step {
    Write {
        first: usize,
        pages: usize,
        value: u8,
    },
    Discard {
        first: usize,
        pages: usize,
    },
    /// Every other page, like a balloon in fragmented memory.
    DiscardAlternate {
        first: usize,
        pages: usize,
    },
    Trim,
    /// Saves the memory, and continues with the restored one.
    SaveAndRestore,
}

fn step() -> impl Strategy<Value = Step> {
    let place = || (0..PAGES, 1..80_usize);
    prop_oneof![
        8 => (place(), 0..4_u8)
            .prop_map(|((first, pages), value)| Step::Write { first, pages, value }),
        4 => place().prop_map(|(first, pages)| Step::Discard { first, pages }),
        1 => place().prop_map(|(first, pages)| Step::DiscardAlternate { first, pages }),
        1 => Just(Step::Trim),
        2 => Just(Step::SaveAndRestore),
    ]
}

fn run(backing: Backing, steps: &[Step]) {
    let mut ram = GuestRam::new(&specs(), backing, HugePages::On, Populate::Lazy).unwrap();
    let mut model = vec![0; PAGES];
    for step in steps {
        match *step {
            Step::Write { first, pages, value } => {
                for index in first..(first + pages).min(PAGES) {
                    write(&ram, &mut model, index, value);
                }
            }
            Step::Discard { first, pages } => {
                let indexes = first..(first + pages).min(PAGES);
                let mut ranges: Vec<_> =
                    indexes.clone().map(|index| GuestRange::new(Pfn(pfn(index)), 1)).collect();
                ebb_guest_ram::coalesce(&mut ranges);
                let outcome = ram.discard(&ranges).unwrap();
                assert_eq!(outcome.bytes, indexes.len() as u64 * PAGE);
                model[indexes].fill(0);
            }
            Step::DiscardAlternate { first, pages } => {
                let indexes: Vec<_> = (first..(first + pages).min(PAGES)).step_by(2).collect();
                let ranges: Vec<_> =
                    indexes.iter().map(|index| GuestRange::new(Pfn(pfn(*index)), 1)).collect();
                assert_eq!(ram.discard(&ranges).unwrap().bytes, ranges.len() as u64 * PAGE);
                for index in indexes {
                    model[index] = 0;
                }
            }
            Step::Trim => {
                for region in ram.regions().to_vec() {
                    ram.discard_zeros(region.pages()).unwrap();
                }
            }
            Step::SaveAndRestore => {
                let (file, image) = save(&ram);
                let data_pages = model.iter().filter(|value| **value != 0).count() as u64;
                assert_eq!(image.data_bytes(), data_pages * PAGE);
                let restored = restore(&file, &image);
                assert_eq!(restored.file_backed_bytes(), image.data_bytes());
                assert_eq!(restored.resident_bytes().unwrap(), 0);
                ram = restored;
            }
        }
        assert_eq!(content(&ram), model, "after {step:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn memory_is_what_the_model_says(
        backing in prop_oneof![Just(Backing::Anonymous), Just(Backing::Memfd)],
        steps in prop::collection::vec(step(), 1..30),
    ) {
        run(backing, &steps);
    }
}
