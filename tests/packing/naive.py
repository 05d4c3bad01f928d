"""The packing algorithms as simple loops: bins in the order they were opened, items in the order they were added."""


def best_fit(order, lengths, capacity, max_items):
    """Put each item into the fullest bin with room; among equally full bins, the one that changed last."""
    bins, room, changed = [], [], []
    for step, item in enumerate(order):
        fitting = [b for b in range(len(bins)) if room[b] >= lengths[item] and len(bins[b]) < max_items]
        if fitting:
            chosen = min(fitting, key=lambda b: (room[b], -changed[b]))
        else:
            chosen = len(bins)
            bins.append([])
            room.append(capacity)
            changed.append(step)
        bins[chosen].append(item)
        room[chosen] -= lengths[item]
        changed[chosen] = step
    return bins


def first_fit(lengths, capacity, max_items):
    bins = []
    for item in range(len(lengths)):
        for items in bins:
            if sum(lengths[i] for i in items) + lengths[item] <= capacity and len(items) < max_items:
                items.append(item)
                break
        else:
            bins.append([item])
    return bins


def best_fit_decreasing(lengths, capacity, max_items):
    order = sorted(range(len(lengths)), key=lambda item: -lengths[item])
    return best_fit(order, lengths, capacity, max_items)


def next_fit(lengths, capacity, max_items):
    bins = []
    for item, length in enumerate(lengths):
        if bins and sum(lengths[i] for i in bins[-1]) + length <= capacity and len(bins[-1]) < max_items:
            bins[-1].append(item)
        else:
            bins.append([item])
    return bins


def windowed(lengths, capacity, max_items, window=1024, threshold=0.95, max_carries=2):
    done, carried = [], {}  # carried: item -> number of carries
    for start in range(0, len(lengths), window):
        stop = min(start + window, len(lengths))
        pool = carried | dict.fromkeys(range(start, stop), 0)
        overdue = {item for item in pool if pool[item] == max_carries}
        order = sorted(pool, key=lambda item: (item not in overdue, -lengths[item], item))
        carried = {}
        for items in sorted(map(sorted, best_fit(order, lengths, capacity, max_items))):
            filled = sum(lengths[item] for item in items) / capacity
            if filled >= threshold or len(items) == max_items or overdue & set(items) or stop == len(lengths):
                done.append(items)
            else:
                carried |= {item: pool[item] + 1 for item in items}
    return done


def fewest_bins(lengths, capacity, max_items):
    """The smallest number of bins, by trying all assignments; for a few documents."""

    def search(position, bins, best):
        if len(bins) >= best:
            return best
        if position == len(order):
            return len(bins)
        for index, (room, held) in enumerate(bins):
            if room >= order[position] and held < max_items:
                changed = [*bins[:index], (room - order[position], held + 1), *bins[index + 1 :]]
                best = search(position + 1, changed, best)
        return search(position + 1, [*bins, (capacity - order[position], 1)], best)

    order = sorted(lengths, reverse=True)
    return search(0, [], len(lengths) + 1)


def fits_into(takes, limits, num_bins):
    """Whether units that take several resources fit into `num_bins` bins, by trying all assignments; for a few units.

    Args:
        takes: what each unit takes of each resource.
        limits: what a bin holds of each resource.
    """

    def search(position, bins):
        if position == len(takes):
            return True
        tried = set()
        for index, held in enumerate(bins):
            now = tuple(has + more for has, more in zip(held, takes[position], strict=True))
            if held not in tried and all(has <= most for has, most in zip(now, limits, strict=True)):
                tried.add(held)
                if search(position + 1, [*bins[:index], now, *bins[index + 1 :]]):
                    return True
        return False

    return search(0, [(0,) * len(limits)] * num_bins)
