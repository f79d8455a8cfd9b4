//! Mapping of transport indexes to the balloon's virtqueues.
//!
//! The specification gives each queue a fixed number (virtio 1.3 section 5.5.2). Drivers and
//! devices deviate: Linux numbers the queues of the *negotiated* features densely (`vm_find_vqs` in
//! drivers/virtio/virtio_mmio.c skips NULL names without using up an index), QEMU and Firecracker
//! those of the *offered* features. A driver written for either, or for the specification, makes
//! queues ready under its own numbers.
//!
//! All three schemes keep the order of the queues. Therefore the set of ready indexes identifies
//! the queues under any scheme: the k-th ready queue is the k-th queue of the negotiated features.
//! Only if the number of ready queues differs from the number of negotiated ones are the schemes
//! tried one by one.

use super::features::{Feature, Features};

/// Number of queues that the specification defines.
pub const STANDARD_QUEUES: usize = 5;

/// Number of queues including the extension's one.
pub const MAX_QUEUES: usize = STANDARD_QUEUES + 1;

/// The meaning of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum QueueKind {
    /// Pages that the driver puts into the balloon.
    Inflate = 0,
    /// Pages that the driver takes out of the balloon.
    Deflate = 1,
    /// Memory statistics; holds a single buffer.
    Statistics = 2,
    /// Free page hinting.
    FreePageHint = 3,
    /// Page reporting.
    Reporting = 4,
    /// Requests of the host and the driver's answers (docs/extension.md).
    HostRequest = 5,
}

impl QueueKind {
    /// All kinds in the order that every numbering scheme keeps.
    pub const ALL: [Self; MAX_QUEUES] = [
        Self::Inflate,
        Self::Deflate,
        Self::Statistics,
        Self::FreePageHint,
        Self::Reporting,
        Self::HostRequest,
    ];

    /// The feature that the queue depends on; `None` if it always exists.
    pub const fn feature(self) -> Option<Feature> {
        match self {
            Self::Inflate | Self::Deflate => None,
            Self::Statistics => Some(Feature::StatisticsQueue),
            Self::FreePageHint => Some(Feature::FreePageHint),
            Self::Reporting => Some(Feature::PageReporting),
            Self::HostRequest => Some(Feature::HostRequest),
        }
    }

    /// The queue's number in the specification; the host request queue's follows the last of them.
    pub const fn specification_index(self) -> usize {
        self as usize
    }

    /// Name in messages and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Inflate => "inflate",
            Self::Deflate => "deflate",
            Self::Statistics => "statistics",
            Self::FreePageHint => "hinting",
            Self::Reporting => "reporting",
            Self::HostRequest => "host_request",
        }
    }
}

/// The queues that exist with a set of features.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueSet(u8);

impl QueueSet {
    /// The queues that exist when `features` are negotiated (or offered).
    pub fn of(features: Features) -> Self {
        let exists =
            |kind: &QueueKind| kind.feature().is_none_or(|feature| features.contains(feature));
        Self(QueueKind::ALL.into_iter().filter(exists).fold(0, |set, kind| set | 1 << kind as u8))
    }

    /// Whether the queue exists.
    pub const fn contains(self, kind: QueueKind) -> bool {
        self.0 & (1 << kind as u8) != 0
    }

    /// The queues in order.
    pub fn iter(self) -> impl Iterator<Item = QueueKind> {
        QueueKind::ALL.into_iter().filter(move |kind| self.contains(*kind))
    }

    /// Number of queues.
    pub const fn count(self) -> usize {
        self.0.count_ones() as usize
    }

    /// Number of queues before `kind`.
    const fn rank(self, kind: QueueKind) -> usize {
        (self.0 & ((1 << kind as u8) - 1)).count_ones() as usize
    }
}

/// A numbering scheme for the queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Numbering {
    /// Fixed numbers, with gaps (virtio 1.3 section 5.5.2).
    Specification,
    /// Without gaps over the negotiated features (Linux).
    DenseNegotiated,
    /// Without gaps over the offered features (QEMU, Firecracker).
    DenseOffered,
}

impl Numbering {
    /// All schemes, the most common one first.
    pub const ALL: [Self; 3] = [Self::DenseNegotiated, Self::Specification, Self::DenseOffered];

    /// Index of `kind` under this scheme.
    pub const fn index(self, kind: QueueKind, offered: QueueSet, negotiated: QueueSet) -> usize {
        match self {
            Self::Specification => kind.specification_index(),
            Self::DenseNegotiated => negotiated.rank(kind),
            Self::DenseOffered => offered.rank(kind),
        }
    }
}

/// A set of transport indexes of queues, 0 to 31, for example the ready ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueIndexes(u32);

impl QueueIndexes {
    /// The empty set.
    pub const NONE: Self = Self(0);

    /// The set with `index` added; indexes above 31, which no balloon has, are ignored.
    #[must_use]
    pub const fn with(self, index: usize) -> Self {
        if index < 32 { Self(self.0 | 1 << index) } else { self }
    }

    /// Whether the set contains `index`.
    pub const fn contains(self, index: usize) -> bool {
        index < 32 && self.0 & (1 << index) != 0
    }

    /// Number of indexes in the set.
    pub const fn count(self) -> usize {
        self.0.count_ones() as usize
    }

    /// The indexes in ascending order.
    pub fn iter(self) -> impl Iterator<Item = usize> {
        (0..32).filter(move |index| self.contains(*index))
    }
}

impl FromIterator<usize> for QueueIndexes {
    fn from_iter<I: IntoIterator<Item = usize>>(indexes: I) -> Self {
        indexes.into_iter().fold(Self::NONE, Self::with)
    }
}

/// Reason why the queues could not be identified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueMapError {
    /// The mandatory queue that the driver did not make ready.
    pub missing: QueueKind,
    /// The ready queues.
    pub ready: QueueIndexes,
}

impl core::fmt::Display for QueueMapError {
    fn fmt(&self, formatter: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(
            formatter,
            "the driver made {} queue(s) ready and no {} queue is among them",
            self.ready.count(),
            self.missing.name()
        )
    }
}

impl core::error::Error for QueueMapError {}

/// The queue at each transport index, resolved once, at activation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueMap {
    index_of: [Option<u8>; MAX_QUEUES],
}

impl QueueMap {
    /// Resolves the mapping.
    ///
    /// `offered` and `negotiated` are feature words, `ready` the transport indexes that the driver
    /// made ready. Queues that are not both negotiated and ready are absent from the map.
    ///
    /// # Errors
    /// [`QueueMapError`] if the inflate or the deflate queue is not ready: these two always exist
    /// and have the numbers 0 and 1 in every scheme.
    pub fn resolve(
        offered: Features,
        negotiated: Features,
        ready: QueueIndexes,
    ) -> Result<Self, QueueMapError> {
        for kind in [QueueKind::Inflate, QueueKind::Deflate] {
            if !ready.contains(kind.specification_index()) {
                return Err(QueueMapError { missing: kind, ready });
            }
        }
        let offered = QueueSet::of(offered);
        let negotiated = QueueSet::of(negotiated);
        if ready.count() == negotiated.count() {
            let mut map = Self::default();
            for (kind, index) in negotiated.iter().zip(ready.iter()) {
                map.index_of[kind as usize] = Some(index as u8);
            }
            return Ok(map);
        }
        Ok(Self::resolve_by_scheme(offered, negotiated, ready))
    }

    /// The mapping if the number of ready queues differs from the number of negotiated ones: by
    /// the scheme that explains most of the ready queues; among equals the most common one.
    fn resolve_by_scheme(offered: QueueSet, negotiated: QueueSet, ready: QueueIndexes) -> Self {
        let mut best = Self::default();
        for numbering in Numbering::ALL {
            let mut map = Self::default();
            for kind in negotiated.iter() {
                let index = numbering.index(kind, offered, negotiated);
                if ready.contains(index) {
                    map.index_of[kind as usize] = Some(index as u8);
                }
            }
            if map.count() > best.count() {
                best = map;
            }
        }
        best
    }

    /// The queue at this transport index.
    pub fn kind(&self, index: usize) -> Option<QueueKind> {
        QueueKind::ALL.into_iter().find(|kind| self.index(*kind) == Some(index))
    }

    /// Transport index of the queue.
    pub fn index(&self, kind: QueueKind) -> Option<usize> {
        self.index_of[kind as usize].map(usize::from)
    }

    /// Number of mapped queues.
    pub fn count(&self) -> usize {
        self.index_of.iter().flatten().count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    /// Every set of offered features with every subset of it that a driver may accept.
    fn offers_and_answers() -> impl Iterator<Item = (Features, Features)> {
        // Bits 6 to 8 are moved to those of the extension.
        let features = |bits: u64| Features(bits & 0x3f | (bits >> 6) << 50);
        (0..512_u64).flat_map(move |offered| {
            // Each subset once: counting downwards within the mask.
            core::iter::successors(Some(offered), move |subset| {
                (*subset != 0).then(|| (subset - 1) & offered)
            })
            .map(move |negotiated| (features(offered), features(negotiated)))
        })
    }

    #[test]
    fn every_scheme_is_resolved_for_every_subset_of_features() {
        for (offered, negotiated) in offers_and_answers() {
            let (offered_set, negotiated_set) = (QueueSet::of(offered), QueueSet::of(negotiated));
            for numbering in Numbering::ALL {
                let index = |kind| numbering.index(kind, offered_set, negotiated_set);
                let ready: QueueIndexes = negotiated_set.iter().map(index).collect();
                let map =
                    QueueMap::resolve(offered, negotiated, ready).expect("all queues are ready");
                assert_eq!(map.count(), negotiated_set.count());
                for kind in QueueKind::ALL {
                    let expected = negotiated_set.contains(kind).then(|| index(kind));
                    assert_eq!(map.index(kind), expected, "{numbering:?} {offered} {negotiated}");
                    if let Some(expected) = expected {
                        assert_eq!(map.kind(expected), Some(kind));
                    }
                }
            }
        }
    }

    #[test]
    fn the_schemes_differ_once_an_earlier_queue_is_declined() {
        let indexes = |kind: QueueKind, offered, negotiated| -> Vec<_> {
            let (offered, negotiated) = (QueueSet::of(offered), QueueSet::of(negotiated));
            Numbering::ALL
                .into_iter()
                .map(|numbering| numbering.index(kind, offered, negotiated))
                .collect()
        };
        let reporting = Features::from(Feature::PageReporting);
        assert_eq!(indexes(QueueKind::Reporting, Features::ALL_BALLOON, reporting), [2, 4, 4]);
        let offered = Features::ALL_WITH_EXTENSION.without(Feature::FreePageHint);
        assert_eq!(
            indexes(QueueKind::HostRequest, offered, reporting.with(Feature::HostRequest)),
            [3, 5, 4]
        );
        // The extension does not move the standard's queues.
        assert_eq!(
            indexes(QueueKind::Reporting, Features::ALL_WITH_EXTENSION, reporting),
            [2, 4, 4]
        );
    }

    #[test]
    fn a_negotiated_queue_that_is_not_ready_is_absent() {
        for numbering in Numbering::ALL {
            let features = Features::ALL_WITH_EXTENSION;
            let all = QueueSet::of(features);
            for missing in QueueKind::ALL.into_iter().skip(2) {
                let ready = all
                    .iter()
                    .filter(|kind| *kind != missing)
                    .map(|kind| numbering.index(kind, all, all))
                    .collect();
                let map = QueueMap::resolve(features, features, ready)
                    .expect("inflate and deflate are ready");
                assert_eq!(map.index(missing), None);
                assert_eq!(map.count(), MAX_QUEUES - 1);
            }
        }
    }

    #[test]
    fn a_ready_queue_that_was_not_negotiated_is_ignored() {
        let ready = (0..MAX_QUEUES).collect();
        let map =
            QueueMap::resolve(Features::ALL_BALLOON, Features::NONE, ready).expect("enough queues");
        assert_eq!(map.count(), 2);
        assert_eq!((2..32).find_map(|index| map.kind(index)), None);
    }

    #[test]
    fn inflate_and_deflate_queues_are_mandatory() {
        let error =
            QueueMap::resolve(Features::ALL_BALLOON, Features::NONE, QueueIndexes::NONE.with(0));
        assert_eq!(error.map_err(|error| error.missing), Err(QueueKind::Deflate));
        let error = QueueMap::resolve(Features::ALL_BALLOON, Features::NONE, QueueIndexes::NONE);
        assert_eq!(error.map_err(|error| error.missing), Err(QueueKind::Inflate));
    }

    #[test]
    fn indexes_above_31_are_ignored() {
        let indexes: QueueIndexes = [0, 31, 32, usize::MAX].into_iter().collect();
        assert_eq!(indexes.iter().collect::<Vec<_>>(), [0, 31]);
        assert!(!indexes.contains(32));
    }
}
