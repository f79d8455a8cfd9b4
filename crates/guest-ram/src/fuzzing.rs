//! Bodies of fuzz targets: each takes arbitrary bytes and panics if this crate misbehaves. They
//! also run as ordinary tests.

use ebb_abi::{HUGE_PAGE_SIZE_PAGES, PAGE_SIZE_BYTES};

use crate::image::{CHUNK_BYTES, Extent, ImageRegion, MAX_EXTENTS, RAM_IMAGE_VERSION, RamImage};
use crate::restore::file_runs;

/// A fuzz target by name.
pub type Target = (&'static str, fn(&[u8]));

/// All targets.
pub const TARGETS: [Target; 1] = [("ram_image", ram_image)];

/// Parses numbers from bytes.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    /// A number of bytes: mostly whole pages, sometimes arbitrary.
    fn bytes(&mut self) -> u64 {
        let kind = self.byte();
        match kind % 8 {
            0..5 => u64::from(self.byte()) * PAGE_SIZE_BYTES,
            5 => u64::from(self.byte()) * PAGE_SIZE_BYTES * HUGE_PAGE_SIZE_PAGES,
            6 => u64::from(self.byte()),
            _ => u64::from_le_bytes(std::array::from_fn(|_| self.byte())),
        }
    }
}

/// The description of saved memory: whatever it contains, it is refused or can be mapped within the
/// regions.
pub fn ram_image(data: &[u8]) {
    let image = image_from(data);
    let right = is_right(&image);
    assert!(image.validate().is_ok() == right, "{:?}: {image:?}", image.validate());
    if right {
        for max_runs in [1, 3, MAX_EXTENTS] {
            check_runs(&image, max_runs);
        }
    }
}

fn image_from(data: &[u8]) -> RamImage {
    let mut input = Input(data);
    let regions: Vec<_> = (0..input.byte() % 5)
        .scan(0, |end: &mut u64, _| {
            let start = end.wrapping_add(input.bytes());
            let size_bytes = input.bytes();
            *end = start.wrapping_add(size_bytes);
            Some(ImageRegion { start, size_bytes })
        })
        .collect();
    let mut end = 0_u64;
    let mut extents = Vec::new();
    while !input.0.is_empty() && extents.len() <= MAX_EXTENTS {
        let offset_bytes = end.wrapping_add(input.bytes());
        let size_bytes = input.bytes();
        end = offset_bytes.wrapping_add(size_bytes);
        extents.push(Extent { offset_bytes, size_bytes });
    }
    let ram_bytes: u128 = regions.iter().map(|region| u128::from(region.size_bytes)).sum();
    let chunks = ram_bytes.div_ceil(u128::from(CHUNK_BYTES)).min(1 << 20) as usize;
    RamImage {
        version: RAM_IMAGE_VERSION,
        regions,
        data_bytes: 0,
        extents,
        chunk_bytes: CHUNK_BYTES,
        checksums: vec![0; chunks],
    }
}

/// The guarantee of [`RamImage::validate`], implemented differently.
fn is_right(image: &RamImage) -> bool {
    let page = u128::from(PAGE_SIZE_BYTES);
    let span = |start: u64, size: u64| (u128::from(start), u128::from(start) + u128::from(size));
    let in_order = |spans: &[(u128, u128)], limit: u128| {
        spans.iter().all(|(start, end)| {
            start < end && end <= &limit && start % page == 0 && end % page == 0
        }) && spans.windows(2).all(|pair| pair[0].1 <= pair[1].0)
    };
    let regions: Vec<_> =
        image.regions.iter().map(|region| span(region.start, region.size_bytes)).collect();
    let extents: Vec<_> =
        image.extents.iter().map(|extent| span(extent.offset_bytes, extent.size_bytes)).collect();
    let ram_bytes: u128 = regions.iter().map(|(start, end)| end - start).sum();
    !regions.is_empty()
        && in_order(&regions, u128::from(u64::MAX))
        && in_order(&extents, ram_bytes)
        && extents.len() <= MAX_EXTENTS
        && image.checksums.len() as u128 == ram_bytes.div_ceil(u128::from(CHUNK_BYTES))
}

/// Checks the mappings of an image.
fn check_runs(image: &RamImage, max_runs: usize) {
    let runs = file_runs(image, max_runs);
    assert!(runs.len() <= max_runs.max(image.regions.len()));
    let mut previous_end = 0;
    for run in &runs {
        let region = image.regions[run.region];
        let before: u64 = image.regions[..run.region].iter().map(|region| region.size_bytes).sum();
        let offset_in_region = run.ram_offset_bytes - before;
        assert!(!run.range.is_empty() && run.ram_offset_bytes >= previous_end);
        assert!(offset_in_region + run.range.size_bytes() <= region.size_bytes);
        assert_eq!(run.range.start.address(), region.start + offset_in_region);
        previous_end = run.ram_offset_bytes + run.range.size_bytes();
    }
    let covered = |offset_bytes: u64| {
        runs.iter().any(|run| {
            (run.ram_offset_bytes..run.ram_offset_bytes + run.range.size_bytes())
                .contains(&offset_bytes)
        })
    };
    for extent in &image.extents {
        assert!(covered(extent.offset_bytes) && covered(extent.end_bytes() - 1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_bytes_are_survived(data in prop::collection::vec(any::<u8>(), 0..200)) {
            for (_, target) in TARGETS {
                target(&data);
            }
        }

        /// Bytes that form valid images.
        #[test]
        fn valid_images_are_survived(extents in prop::collection::vec((0..9_u8, 1..9_u8), 0..60)) {
            let extents = extents.into_iter().flat_map(|(gap, pages)| [0, gap, 0, pages]);
            let prefix = [3, 5, 1, 5, 9, 0, 0, 0, 3, 1, 1, 5, 40];
            let data: Vec<_> = prefix.into_iter().chain(extents).collect();
            prop_assert_eq!(image_from(&data).validate(), Ok(()));
            ram_image(&data);
        }
    }
}
